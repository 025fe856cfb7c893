#!/bin/bash
cd /app
grep nogose zoboto.md | wc -l > deni.log
