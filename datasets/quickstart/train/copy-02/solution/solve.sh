#!/bin/bash
cd /app
cp topado.csv popesi.dat
