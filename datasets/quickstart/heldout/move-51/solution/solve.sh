#!/bin/bash
cd /app
mv lazogo.csv kule/
