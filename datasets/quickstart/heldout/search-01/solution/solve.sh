#!/bin/bash
cd /app
grep votefa mifosu.dat > nubo.log
