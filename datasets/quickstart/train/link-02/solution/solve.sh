#!/bin/bash
cd /app
ln -s zunu/dete.dat duvu
