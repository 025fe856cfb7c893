#!/bin/bash
cd /app
grep dika zozolu.csv >> losa.csv
