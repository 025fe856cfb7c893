#!/bin/bash
cd /app
grep basoku goga.txt > zitazo.csv
