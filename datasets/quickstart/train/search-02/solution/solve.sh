#!/bin/bash
cd /app
grep vemota reni_sapovi.md > romo.csv
