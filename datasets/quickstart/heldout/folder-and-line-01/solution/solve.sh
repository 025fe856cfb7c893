#!/bin/bash
cd /app
mkdir seza && echo 5714 >> ruro.md
