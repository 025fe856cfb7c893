#!/bin/bash
cd /app
grep dale femize.txt > tebi.txt
