#!/bin/bash
cd /app
grep zoma kanu.md | wc -l > viza.dat
