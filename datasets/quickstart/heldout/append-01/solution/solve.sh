#!/bin/bash
cd /app
echo tigatu totaru >> vubevu.txt
