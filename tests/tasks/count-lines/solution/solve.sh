#!/bin/bash
find /app/data -type f -exec cat {} + | wc -l > /app/count.txt
