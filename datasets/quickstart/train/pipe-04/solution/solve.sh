#!/bin/bash
cd /app
sort dupo_potu.md | head -n 2 > vubi.log
