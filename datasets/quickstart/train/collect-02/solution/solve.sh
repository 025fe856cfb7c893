#!/bin/bash
cd /app
grep lerudo sovu_pomo.log >> budobu.dat
