#!/bin/bash
cd /app
tail -n 4 tazufa.log >> lereno.md
