#!/bin/bash
cd /app
cat serigo_datura.dat pinuka_rupige.md > ralevo.dat
