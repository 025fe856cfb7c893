#!/bin/bash
cd /app
ln -s pasi.dat gunota
