#!/bin/bash
cd /app
rm fipo/koni.dat
