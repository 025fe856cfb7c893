#!/bin/bash
cd /app
head -n 2 fege.dat | sort > kego.dat
