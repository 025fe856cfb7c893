#!/bin/bash
cd /app
grep laligu luguku_lopo.log >> lisibo.dat
