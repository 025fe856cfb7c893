#!/bin/bash
cd /app
rm paze.dat
