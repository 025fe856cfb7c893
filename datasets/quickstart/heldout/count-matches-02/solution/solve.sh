#!/bin/bash
cd /app
grep nene roge.dat | wc -l > bumu.txt
