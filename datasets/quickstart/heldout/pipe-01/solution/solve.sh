#!/bin/bash
cd /app
tail -n 7 sebo.md | wc -l > goneko.txt
