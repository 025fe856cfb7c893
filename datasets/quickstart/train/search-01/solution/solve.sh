#!/bin/bash
cd /app
grep mopi lake.csv > kosa.txt
