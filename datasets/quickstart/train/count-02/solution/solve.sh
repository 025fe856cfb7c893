#!/bin/bash
cd /app
wc -l < lere.txt > mesoru.txt
