#!/bin/bash
cd /app
wc -l < gimone.csv > tiga.dat
