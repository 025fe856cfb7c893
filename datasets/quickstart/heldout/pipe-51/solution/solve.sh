#!/bin/bash
cd /app
sort revi.dat | grep sumota > tisaku.csv
