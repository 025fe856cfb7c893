#!/bin/bash
cd /app
grep mala kibi.log | wc -l > kage.csv
