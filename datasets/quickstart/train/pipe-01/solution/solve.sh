#!/bin/bash
cd /app
tail -n 2 tafuti_biro.md | wc -l > gavazu.md
