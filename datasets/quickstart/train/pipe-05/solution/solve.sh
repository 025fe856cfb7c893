#!/bin/bash
cd /app
sort zida.csv | wc -l > mova.log
