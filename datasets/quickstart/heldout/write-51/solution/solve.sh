#!/bin/bash
cd /app
echo pete > tunodu.txt
