#!/bin/bash
cd /app
head -n 16 pefi.md >> poni.dat
