#!/bin/bash
cd /app
tail -n 4 fudo_kana.md >> samida.dat
