#!/bin/bash
cd /app
wc -l < lunone.md > bole.csv
