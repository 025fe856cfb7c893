#!/bin/bash
cd /app
sort pumu.log | grep beta > vigi.txt
