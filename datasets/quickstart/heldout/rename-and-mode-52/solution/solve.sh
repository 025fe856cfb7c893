#!/bin/bash
cd /app
mv lesi.md zomu.md && chmod 750 tepure.dat
