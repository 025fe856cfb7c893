#!/bin/bash
cd /app
sort zozura.dat > niru.dat
