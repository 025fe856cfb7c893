#!/bin/bash
cd /app
grep botezu gini.dat > doda.txt
