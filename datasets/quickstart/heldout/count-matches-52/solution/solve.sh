#!/bin/bash
cd /app
grep buze buvo.txt | wc -l > zetima.md
