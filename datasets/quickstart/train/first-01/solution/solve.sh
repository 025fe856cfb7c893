#!/bin/bash
cd /app
head -n 5 pube.txt > ridiso.txt
