#!/bin/bash
cd /app
mv fapo/lika.md sabire.csv
