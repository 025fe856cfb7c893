#!/bin/bash
cd /app
grep nibo sivo.csv | wc -l > soma.log
