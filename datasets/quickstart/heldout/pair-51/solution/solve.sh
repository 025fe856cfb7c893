#!/bin/bash
cd /app
ln -s muke.txt rini && echo teri > fobi.csv
