#!/bin/bash
cd /app
echo tunopu > lida.txt && mv dekuse.md bole.csv
