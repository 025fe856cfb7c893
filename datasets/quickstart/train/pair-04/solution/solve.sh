#!/bin/bash
cd /app
echo nenu > zore.csv && echo vedi >> tepo.log
