#!/bin/bash
cd /app
grep fekusi semo.dat | wc -l > zofa.dat
