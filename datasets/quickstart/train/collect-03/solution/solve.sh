#!/bin/bash
cd /app
grep dazuvu zipu.txt >> guzi.log
