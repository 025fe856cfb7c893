#!/bin/bash
cd /app
grep zozupo kimo.txt >> dari.csv
