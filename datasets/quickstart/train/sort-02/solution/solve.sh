#!/bin/bash
cd /app
sort tugapi.log > masa.csv
