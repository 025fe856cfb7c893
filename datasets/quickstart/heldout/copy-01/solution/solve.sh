#!/bin/bash
cd /app
cp lanuka/nibu.txt gogu.csv
