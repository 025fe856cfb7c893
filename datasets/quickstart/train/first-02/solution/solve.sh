#!/bin/bash
cd /app
head -n 11 vodaki.dat > nebi_rube.md
