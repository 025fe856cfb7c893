#!/bin/bash
cd /app
head -n 6 sepo.md > tivu.log
