#!/bin/bash
cd /app
mv bani.csv zoruzi.md
