#!/bin/bash
cd /app
cp vave.txt fumu.md && mkdir muvo
