#!/bin/bash
cd /app
grep kide pobe.dat | wc -l > dimofi.csv
