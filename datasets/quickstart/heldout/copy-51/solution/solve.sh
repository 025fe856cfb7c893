#!/bin/bash
cd /app
cp ruzu.dat peti.csv
